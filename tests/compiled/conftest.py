"""The `pool` fixture, for programs that are compiled on several ranks."""

from tests.processes.conftest import pool as pool
