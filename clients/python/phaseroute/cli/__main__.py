"""`python -m phaseroute.cli`, for where the `phaseroute` script is not on the path."""

from phaseroute.cli.app import main

main()
