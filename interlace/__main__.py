"""``python -m interlace`` is the ``interlace`` command."""

import sys

from interlace.cli import main

sys.exit(main())
