"""How much do fault-free runs of one training differ, and why?"""

from __future__ import annotations
