"""Runs the command `tailcast` for `python -m tailcast`."""

from tailcast.cli import main

raise SystemExit(main())
