"""The lock for what a process has only once: global random generators, torch's tracer, filters of
warnings, and the list of its child processes.

Whoever changes one of these holds the lock, so several threads of a program can simulate at the
same time. A fork is made under the lock, too: a child never begins in the middle of a change.
"""

import threading

PROCESS_LOCK = threading.RLock()
