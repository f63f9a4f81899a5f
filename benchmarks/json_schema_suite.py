"""JSON Schema's official test-suite, draft 2020-12, on every grammar engine.

    python benchmarks/json_schema_suite.py [--engines guidance,outlines] [--reasons] [--json FILE]

Prints for each engine how many of the suite's schemas it accepts and refuses, how many instances it is narrower on, by
cause, and how many it gets wrong. `llmkit.testing.schema_test_suite` says what each of these means. The suite is
fetched once, from the source distribution of jsonschema on the Python package index.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from llmkit.hookspecs.structured import GrammarCompiler
from llmkit.registry import Registry
from llmkit.testing.grammar import small_vocabulary
from llmkit.testing.schema_test_suite import REQUIREMENT, Report, judge, load


def engines(chosen: str | None) -> list[str]:
    """The engines asked for, else all that llmkit comes with."""
    if chosen:
        return chosen.split(",")
    return sorted(row.name for row in Registry.discover().find("structured") if row.distribution == "llmkit")


def as_json(report: Report, seconds: float) -> dict[str, Any]:
    """The whole report."""
    return {
        "schemas": report.num_groups,
        "accepted": report.accepted,
        "refused": sum(report.refused.values()),
        "refused_because": dict(report.refused.most_common()),
        "narrower": dict(report.narrower.most_common()),
        "wrong": report.wrong,
        "seconds": round(seconds, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="JSON Schema's test-suite on grammar engines")
    parser.add_argument("--engines", help="names, comma-separated; default: all of llmkit's own")
    parser.add_argument("--reasons", action="store_true", help="print why schemas were refused")
    parser.add_argument("--json", help="write the reports to this file")
    arguments = parser.parse_args()
    registry, vocabulary, groups = Registry.discover(), small_vocabulary(), load()
    reports: dict[str, dict[str, Any]] = {}
    print(f"{len(groups)} schemas of the suite in {REQUIREMENT}\n")
    print(f"{'engine':<20}{'accepted':>10}{'share':>8}{'refused':>10}{'narrower':>10}{'wrong':>8}{'seconds':>9}")
    for name in engines(arguments.engines):
        compiler: GrammarCompiler = registry.build(registry.load("structured", name), {"vocabulary": vocabulary})
        start = time.perf_counter()
        report = judge(compiler, vocabulary, groups)
        reports[name] = found = as_json(report, time.perf_counter() - start)
        share = f"{100 * report.accepted / report.num_groups:.0f} %"
        narrower = sum(report.narrower.values())
        print(
            f"{name:<20}{report.accepted:>10}{share:>8}{found['refused']:>10}{narrower:>10}{len(report.wrong):>8}"
            f"{found['seconds']:>9}"
        )
        details = [f"  wrong: {sentence}" for sentence in report.wrong]
        details += [f"  narrower on {count}: {cause}" for cause, count in report.narrower.most_common()]
        if arguments.reasons:
            details += [f"  refused {count}: {reason}" for reason, count in report.refused.most_common()]
        print("\n".join(details))
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(reports, file, ensure_ascii=False, indent=1)
    return 1 if any(found["wrong"] for found in reports.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
