"""The parts of one router, put together."""

from __future__ import annotations

from router_service.admission import Admission, AdmissionLimits
from router_service.continuation import RelayLimits
from router_service.experience import Experience
from router_service.fleet import Fleet
from router_service.follower import Following
from router_service.ledger import Ledger
from router_service.lengths import LengthFile, make_lengths
from router_service.relay import Relay
from router_service.routing import Routing
from router_service.settings import RouterSettings
from router_service.view import FleetView
from service_kit.telemetry import Telemetry


class Router:
    """Made on the running event loop; works while `async with router.fleet` lasts."""

    def __init__(self, settings: RouterSettings, telemetry: Telemetry) -> None:
        """Raises `StartupFailed` for certificates or a token that cannot be used."""
        self.ledger = Ledger()
        lengths = make_lengths(settings.output_lengths)
        self.length_file = LengthFile(lengths, settings.state_dir) if settings.keep_lengths else None
        """To be entered before requests come, and left after the last one."""
        self.fleet = Fleet(
            settings.targets,
            self.ledger,
            security=settings.peer_security,
            following=Following(poll_s=settings.status_poll_s, silence_s=settings.status_silence_s),
            breaker=settings.breaker,
            stall_s=settings.stall_s,
        )
        self.admission = Admission(
            AdmissionLimits(settings.max_in_flight, settings.max_in_flight_tokens), finish_s=self.ledger.finish_s
        )
        self.routing = Routing(
            self.fleet,
            self.ledger,
            policy=settings.policy,
            probe_timeout_s=settings.probe_timeout_s,
            objective=settings.objective,
            experience=Experience(lengths, settings.objective),
            telemetry=telemetry,
        )
        self.relay = Relay(
            self.fleet,
            self.routing,
            telemetry=telemetry,
            limits=RelayLimits(
                max_attempts=settings.max_attempts,
                max_replayed_tokens=settings.max_replayed_tokens,
                max_wait_s=settings.continue_wait_s,
            ),
        )
        self.view = FleetView(self.fleet, self.ledger)
