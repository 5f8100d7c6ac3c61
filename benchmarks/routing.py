"""Every simulated table of docs/benchmarks/routing.md, and whether the aims are met. SIMULATED.

    python -m benchmarks.routing                     print the tables, then one JSON line
    python -m benchmarks.routing --only tail third   some of them
    python -m benchmarks.routing --write docs/benchmarks/routing.md
                                                     put them between the page's two markers, and the plots beside it

Takes some minutes on one core; the same figures every time. Exit code 1 when an aim is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.routing_sim import article_sections
from benchmarks.routing_sim.page import Section, Target, targets_table
from benchmarks.routing_sim.plays import POLICIES, article, played
from benchmarks.routing_sim.question_sections import SECTIONS
from phaseroute.plots import crossover, predicted_vs_actual, save, timeline, ttft_cdf
from simulator.crossover import Asked, crossover_map

BEGIN = "<!-- simulated tables: python -m benchmarks.routing --write -->"
END = "<!-- end of the simulated tables -->"
MAKERS: dict[str, Callable[[], Section]] = {
    "article": article_sections.reproduced,
    "predictive": article_sections.predicted,
    **{maker.__name__.replace("_", "-"): maker for maker in SECTIONS},
}


def written(page: Path, sections: Sequence[Section], targets: Sequence[Target]) -> None:
    """The page with new tables. Raises `SystemExit` where it has no place for them."""
    text = page.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise SystemExit(f"{page} has no place for the tables; add the lines {BEGIN!r} and {END!r}")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    body = "\n\n".join([f"## Aims\n\n{targets_table(targets).markdown()}", *(each.markdown() for each in sections)])
    page.write_text(f"{before}{BEGIN}\n\n{body}\n\n{END}{after}", encoding="utf-8")


def plotted(folder: Path) -> None:
    """The plots that the page shows, as PNG only."""
    folder.mkdir(parents=True, exist_ok=True)
    for policy in ("forced:gpu", "two_phase", "predictive"):
        save(timeline(played("article48", policy)), folder / f"timeline_{policy.replace(':', '_')}")
    poisson = [played("poisson", policy) for policy in POLICIES]
    save(ttft_cdf(poisson), folder / "ttft_cdf_poisson")
    save(predicted_vs_actual([played("sustained", "predictive")]), folder / "predicted_vs_actual_sustained")
    asked = Asked(prompt_tokens=516, max_new_tokens=128)
    for policy in ("two_phase", "predictive"):
        chart = crossover_map(
            policy, article(), "gpu", asked=asked, backlog=range(0, 25), cached_tokens=range(0, 516, 32)
        )
        save(crossover(chart), folder / f"crossover_{policy}")
    for drawing in folder.glob("*.svg"):
        drawing.unlink()


def main(argv: Sequence[str]) -> int:
    """Print the tables; 0 when every aim is met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*MAKERS, "aims"], help="these tables and no others")
    parser.add_argument("--write", type=Path, help="a page with the markers; all tables")
    arguments = parser.parse_args(argv)
    if arguments.write and arguments.only:
        parser.error("--write puts all tables on the page; leave out --only")
    wanted = arguments.only or [*MAKERS, "aims"]
    began_s = time.monotonic()
    sections = [maker() for name, maker in MAKERS.items() if name in wanted]
    targets = list(article_sections.targets()) if "aims" in wanted else []
    for section in sections:
        print(f"{section.markdown()}\n")
    if targets:
        print(f"## Aims\n\n{targets_table(targets).markdown()}\n")
    if arguments.write:
        written(arguments.write, sections, targets)
        plotted(arguments.write.with_suffix(""))
    print(
        json.dumps(
            {
                "benchmark": "routing",
                "simulated": True,
                "seconds": round(time.monotonic() - began_s, 1),
                "aims": [{"what": t.what, "aim": t.aim, "value": t.value, "met": t.met} for t in targets],
                "tables": {
                    section.name: [{"columns": table.columns, "rows": table.rows} for table in section.tables]
                    for section in sections
                },
            }
        )
    )
    return 0 if all(target.met for target in targets) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
