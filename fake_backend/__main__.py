import sys

from fake_backend.cli import main

sys.exit(main())
