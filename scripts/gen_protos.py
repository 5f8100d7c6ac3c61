"""Generate the Python code of protos/ with one pinned compiler, in an environment of its own.

    python scripts/gen_protos.py            write *_pb2.py, *_pb2.pyi and *_pb2_grpc.py beside their .proto
    python scripts/gen_protos.py --check    write nothing; exit 1 when what is checked in differs

The pin stands in pyproject.toml (dependency group `codegen`): generated code asks for a protobuf and a grpcio at least
as new as its compiler's, so a newer compiler would shut out users of the older ones.
"""

from __future__ import annotations

import argparse
import difflib
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
ENVIRONMENT = ROOT / ".venv-codegen"
PATTERNS = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py")


def compiler() -> Path:
    """The Python of an environment that holds exactly the pinned tools; made on first use and when the pin changes."""
    pins = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["codegen"]
    python = ENVIRONMENT / "bin" / "python"
    stamp = ENVIRONMENT / "pins"
    if not stamp.exists() or stamp.read_text().split() != pins:
        subprocess.run([sys.executable, "-m", "venv", "--clear", ENVIRONMENT], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *pins], check=True)
        stamp.write_text("\n".join(pins))
    return python


def generate(output: Path) -> None:
    """Compile every .proto under protos/ into `output`, which becomes an import root."""
    sources = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    outputs = [f"--{kind}_out={output}" for kind in ("python", "pyi", "grpc_python")]
    subprocess.run([compiler(), "-m", "grpc_tools.protoc", f"-I{PROTOS}", *outputs, *sources], check=True, cwd=PROTOS)


def contents(root: Path) -> dict[str, str]:
    """Generated files below `root`, by relative path."""
    return {str(path.relative_to(root)): path.read_text() for glob in PATTERNS for path in root.rglob(glob)}


def check() -> int:
    """Print what differs between protos/ and a fresh generation; the exit code."""
    with tempfile.TemporaryDirectory() as directory:
        generate(Path(directory))
        fresh, kept = contents(Path(directory)), contents(PROTOS)
    for name in sorted(fresh.keys() | kept.keys()):
        before, after = kept.get(name, "").splitlines(), fresh.get(name, "").splitlines()
        print("\n".join(difflib.unified_diff(before, after, f"checked in/{name}", f"generated/{name}", lineterm="")))
    if fresh == kept:
        return 0
    print("Generated code is out of date: run `make proto` and commit the result.", file=sys.stderr)
    return 1


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare")
    if parser.parse_args().check:
        return check()
    generate(PROTOS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
