"""`python -m backend_service`: see --help."""

from __future__ import annotations

import os
import sys

from backend_service.host import host
from backend_service.settings import BackendSettings
from service_kit.logs import configure_logs
from service_kit.serve import run
from service_kit.telemetry import Telemetry


async def serve() -> int:
    """Run one backend until it is told to stop; the process's exit code."""
    settings = BackendSettings.load(sys.argv[1:])
    configure_logs(settings.log_format, settings.log_level)
    telemetry = Telemetry.from_environment("phaseroute-backend")
    async with host(settings, telemetry) as hosted:
        return await hosted.server.run_until_stopped()


def main() -> None:
    """Entry point of `phaseroute-backend`."""
    code = run(serve())
    if "mlx.core" in sys.modules:
        # All is stopped and flushed. What MLX leaves to the end of the process aborts it on CUDA ("terminate called"),
        # where the thread that computed has ended before.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
