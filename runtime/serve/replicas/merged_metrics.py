"""The metrics of several replicas as one page, each with the label ``replica``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector


def merged(pages: Mapping[str, str]) -> bytes:
    """One page.

    Args:
        pages: by replica.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Pages(pages))
    return generate_latest(registry)


class _Pages(Collector):
    def __init__(self, pages: Mapping[str, str]) -> None:
        self._pages = pages

    def collect(self) -> Iterator[Metric]:
        found: dict[str, Metric] = {}
        for replica, page in sorted(self._pages.items()):
            for family in text_string_to_metric_families(page):
                all_of_it = found.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    all_of_it.add_sample(
                        sample.name, {**sample.labels, "replica": replica}, sample.value, sample.timestamp
                    )
        yield from found.values()
