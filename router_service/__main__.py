"""`python -m router_service`: see --help."""

from __future__ import annotations

import sys

from router_service.host import host
from router_service.settings import RouterSettings
from service_kit.logs import configure_logs
from service_kit.serve import run
from service_kit.telemetry import Telemetry


async def serve() -> int:
    """Run one router until it is told to stop; the process's exit code."""
    settings = RouterSettings.load(sys.argv[1:])
    configure_logs(settings.log_format, settings.log_level)
    async with host(settings, Telemetry.from_environment("phaseroute-router")) as hosted:
        return await hosted.server.run_until_stopped()


def main() -> None:
    """Entry point of `phaseroute-router`."""
    sys.exit(run(serve()))


if __name__ == "__main__":
    main()
