"""Python imports this by itself at its start: processes that tests start compute on the CPU too.

It is on the path only where MLX's default device is a GPU, and with `pytest --pretend-mac`.
"""

import os

import platform_pretence

platform_pretence.use_cpu()
if os.environ.get(platform_pretence.VARIABLE):
    platform_pretence.pretend_mac()
