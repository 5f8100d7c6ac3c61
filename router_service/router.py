"""The parts of one router, put together."""

from __future__ import annotations

from router_service.experience import Experience
from router_service.fleet import Fleet
from router_service.follower import Following
from router_service.ledger import Ledger
from router_service.lengths import make_lengths
from router_service.relay import Relay
from router_service.routing import Routing
from router_service.settings import RouterSettings
from router_service.view import FleetView
from service_kit.telemetry import Telemetry


class Router:
    """Made on the running event loop; works while `async with router.fleet` lasts."""

    def __init__(self, settings: RouterSettings, telemetry: Telemetry) -> None:
        self.ledger = Ledger()
        self.fleet = Fleet(
            settings.targets,
            self.ledger,
            following=Following(poll_s=settings.status_poll_s, silence_s=settings.status_silence_s),
        )
        self.routing = Routing(
            self.fleet,
            self.ledger,
            policy=settings.policy,
            probe_timeout_s=settings.probe_timeout_s,
            objective=settings.objective,
            experience=Experience(make_lengths(settings.output_lengths), settings.objective),
            telemetry=telemetry,
        )
        self.relay = Relay(self.fleet, self.routing, telemetry=telemetry)
        self.view = FleetView(self.fleet, self.ledger)
