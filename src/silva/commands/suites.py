"""`silva eval --list`: the suites of the field."""

from __future__ import annotations

import json

from silva.commands.command import Given
from silva.monitoring.printable import put


def list_suites(given: Given) -> int:
    from silva.evaluation.suites import rows

    given.only(0, "no more than --list and --json")
    found = rows()
    if "--json" in given:
        put(json.dumps(found, indent=1))
        return 0
    width = max(len(row["name"]) for row in found)
    for row in found:
        gate = f"; {row['gate']}" if row["gate"] else ""
        put(f"{row['name']:<{width}}  {row['rows']:>6,} rows  {row['metric']}, {row['licence']}{gate}")
        put(f"{'':<{width}}  {row['title']}: {row['source']}")
    return 0
