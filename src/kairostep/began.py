"""When this process first imported kairostep: a command begins here, seconds before its other imports are done."""

import time

BEGAN = time.monotonic()
