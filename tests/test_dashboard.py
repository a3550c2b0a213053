"""deploy/grafana: a dashboard that Grafana reads, of metrics that exist."""

import re
from typing import Annotated, Any, Literal

import dashboard
import msgspec
import pytest
from msgspec import Meta

from kvferry.endpoint.metric_table import METRICS, Metric, MetricKind

# The part of Grafana's published schema (grafana-foundation-sdk, jsonschema/, which the file was held against
# as of f178d5a: dashboard, timeseries, prometheus) that this one uses, said again: a field that is not in
# it, or has another type or range, is an error.


class Strict(msgspec.Struct, forbid_unknown_fields=True):
    """What has these fields, and no others."""


Nature = Annotated[int, Meta(ge=0)]
Size = Annotated[int, Meta(gt=0)]
Some = Annotated[str, Meta(min_length=1)]
Zero = Literal[0, 1, 2]


class DataSource(Strict):
    type: Literal["prometheus"]
    uid: Literal["${datasource}"]


class GridPos(Strict):
    h: Size
    w: Annotated[int, Meta(gt=0, le=24)]
    x: Annotated[int, Meta(ge=0, lt=24)]
    y: Nature


class Threshold(Strict):
    color: Some
    value: float | None


class Thresholds(Strict):
    mode: Literal["absolute", "percentage"]
    steps: Annotated[list[Threshold], Meta(min_length=1)]


class Color(Strict):
    mode: Literal["thresholds", "palette-classic", "palette-saturated", "continuous-GrYlRd", "fixed"]


class ThresholdsStyle(Strict):
    mode: Literal["off", "line", "dashed", "area", "line+area", "dashed+area", "series"]


class Custom(Strict, rename="camel"):
    line_width: Nature
    fill_opacity: Annotated[int, Meta(ge=0, le=100)]
    show_points: Literal["auto", "never", "always"]
    thresholds_style: ThresholdsStyle


class Defaults(Strict):
    unit: Literal["short", "s", "bytes", "Bps"]
    min: float
    color: Color
    thresholds: Thresholds
    custom: Custom


class FieldConfig(Strict):
    defaults: Defaults
    overrides: list[Any]


class Legend(Strict, rename="camel"):
    display_mode: Literal["list", "table", "hidden"]
    placement: Literal["bottom", "right"]
    show_legend: bool
    calcs: list[str]


class Tooltip(Strict):
    mode: Literal["single", "multi", "none"]
    sort: Literal["asc", "desc", "none"]


class PanelOptions(Strict):
    legend: Legend
    tooltip: Tooltip


class Target(Strict, rename="camel"):
    ref_id: Annotated[str, Meta(pattern="^[A-Z]$")]
    datasource: DataSource
    editor_mode: Literal["code", "builder"]
    expr: Some
    legend_format: str
    range: bool


class TimeSeries(Strict, rename="camel", tag="timeseries"):
    id: Size
    title: Some
    description: str
    datasource: DataSource
    grid_pos: GridPos
    field_config: FieldConfig
    options: PanelOptions
    targets: Annotated[list[Target], Meta(min_length=1)]


class Row(Strict, rename="camel", tag="row"):
    id: Size
    title: Some
    collapsed: bool
    grid_pos: GridPos
    panels: Annotated[list[Any], Meta(max_length=0)]


class Variable(msgspec.Struct):
    """Grafana leaves these open."""

    name: Annotated[str, Meta(pattern=r"^\w+$")]
    type: Literal["query", "adhoc", "constant", "datasource", "interval", "textbox", "custom", "system"]
    hide: Zero
    query: Some
    datasource: DataSource | None = None


class Templating(Strict):
    list: list[Variable]


class Annotations(Strict):
    list: list[Any]


class TimeRange(Strict, rename={"start": "from"}):
    start: Some
    to: Some


class Dashboard(Strict, rename="camel"):
    uid: Annotated[str, Meta(max_length=40, min_length=1)]
    title: Some
    description: str
    tags: list[str]
    schema_version: Annotated[int, Meta(ge=36, le=42)]
    version: Nature
    editable: bool
    graph_tooltip: Zero
    timezone: str
    refresh: str
    time: TimeRange
    templating: Templating
    annotations: Annotations
    links: list[Any]
    panels: list[TimeSeries | Row]


@pytest.fixture(scope="module")
def read():
    return msgspec.json.decode(dashboard.FILE.read_bytes(), type=Dashboard)


def test_it_is_what_the_tool_writes():
    written = dashboard.FILE.read_text(encoding="utf-8")
    assert written == dashboard.text(), "run python tools/dashboard.py, and commit the file"


def test_grafana_reads_it(read):
    ids = [panel.id for panel in read.panels]
    assert len(ids) == len(set(ids)) > 20
    cells = [
        (x, y)
        for panel in read.panels
        for x in range(panel.grid_pos.x, panel.grid_pos.x + panel.grid_pos.w)
        for y in range(panel.grid_pos.y, panel.grid_pos.y + panel.grid_pos.h)
    ]
    assert len(cells) == len(set(cells)), "two panels overlap"
    assert max(x for x, _ in cells) < 24
    for panel in read.panels:
        if isinstance(panel, TimeSeries):
            refs = [target.ref_id for target in panel.targets]
            assert len(refs) == len(set(refs))


@pytest.mark.parametrize(
    ("good", "spoilt"),
    [
        ('"w": 8', '"w": 25'),
        ('"graphTooltip": 1', '"graphTooltip": 3'),
        ('"expr"', '"exp"'),
        ('"unit": "s"', '"unit": 5'),
    ],
)
def test_the_schema_notices_what_is_wrong(good, spoilt):
    text = dashboard.text()
    assert good in text
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text.replace(good, spoilt, 1), type=Dashboard)


def queries(read):
    return [t.expr for panel in read.panels if isinstance(panel, TimeSeries) for t in panel.targets]


def test_every_metric_of_it_exists_with_its_labels_and_none_is_left_out(read):
    """tests/endpoint/test_metrics.py sees each of them alive."""
    exposed: dict[str, Metric] = {}
    for metric in METRICS.values():
        endings = ("_bucket", "_sum", "_count") if metric.kind is MetricKind.HISTOGRAM else ("",)
        exposed |= {f"{metric.exposed}{ending}": metric for ending in endings}
    shown = set()
    for query in queries(read):
        for name, matchers in re.findall(r'\{__name__=~"\(vllm:\)\?(\w+)"(.*?)\}', query):
            metric = exposed[name]
            shown.add(metric.name)
            used = set(re.findall(r'(\w+)(?:=~|!=|!~|=)"', matchers)) - {"job", "instance"}
            by = {label for some in re.findall(r"by \(([\w, ]+)\)", query) for label in some.split(", ")}
            by -= {"le"}
            assert used | by <= set(metric.label_names), query
    assert shown == METRICS.keys()


def test_parentheses_of_queries_close(read):
    for query in queries(read):
        for opening, closing in ("()", "{}", "[]"):
            assert query.count(opening) == query.count(closing)
        variables = set(re.findall(r"\$(\w+)", query)) - {"__rate_interval"}
        assert variables <= {variable.name for variable in read.templating.list}
