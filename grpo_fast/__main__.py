"""`python -m grpo_fast` is `grpo-fast`."""

import sys

from grpo_fast.cli import main

sys.exit(main())
