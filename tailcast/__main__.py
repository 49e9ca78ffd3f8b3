"""`python -m tailcast`: the command `tailcast`."""

from tailcast.cli import main

raise SystemExit(main())
