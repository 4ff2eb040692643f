"""`python -m router` is the command `warmroute`."""

import sys

from router.cli import main

sys.exit(main())
