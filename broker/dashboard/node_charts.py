"""Show the usage of a job's nodes: small charts of the last samples, and a table of the newest sample of each node."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from broker.dashboard.html import Content, Markup, element, join, table
from broker.formatting import format_bytes, format_duration, format_part, format_share
from broker.jobs.node_samples import HISTORIES_MAX, divide, mean_of_known
from broker.types import GpuSample, NodeHistory, NodeSample

WIDTH, HEIGHT = 280, 84
LEFT, RIGHT, TOP, BOTTOM = 4, 4, 6, 18
GAP_S = 45.0  # between two samples, above which the line is cut: four samples were lost
HEADS = ["Node", "CPU", "Memory", "Disk", "Disk read/written", "Network in/out", "Xid errors"]
GPU_HEADS = ["Node", "GPU", "In use", "Memory", "Temperature", "Power"]
Reader = Callable[[NodeSample], float | None]


def read_gpu_ratio(sample: NodeSample) -> float | None:
    """Return the mean utilization of a node's GPUs as a fraction of 1; None if it is unknown."""
    return mean_of_known([gpu.ratio for gpu in sample.gpus])


def _read_gpu_memory(sample: NodeSample) -> float | None:
    return mean_of_known([divide(gpu.memory_used_bytes, gpu.memory_bytes) for gpu in sample.gpus])


def _add(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else first + second


# title -> (what is drawn, whether it is a share of 1)
MEASURES: dict[str, tuple[Reader, bool]] = {
    "GPU": (read_gpu_ratio, True),
    "GPU memory": (_read_gpu_memory, True),
    "CPU": (lambda sample: sample.cpu_ratio, True),
    "Memory": (lambda sample: divide(sample.memory_used_bytes, sample.memory_bytes), True),
    "Network": (lambda sample: _add(sample.network_received_bytes_s, sample.network_sent_bytes_s), False),
    "Disk": (lambda sample: _add(sample.disk_read_bytes_s, sample.disk_written_bytes_s), False),
}


def show_nodes(nodes: Sequence[NodeHistory]) -> Markup:
    """Show the usage of the nodes; nothing if no node has reported."""
    if not nodes:
        return Markup("")
    charts = [chart for title, measure in MEASURES.items() if (chart := draw_measure(title, nodes, *measure))]
    parts: list[Content] = [element("h2", "Nodes"), element("div", *charts, class_="small-charts")]
    current = [node for node in nodes if node.is_current]
    if current:
        parts.append(table(HEADS, [_list_cells(node) for node in current], caption="Nodes now", right=HEADS))
        if gpus := [cells for node in current for cells in _list_gpu_cells(node)]:
            parts.append(table(GPU_HEADS, gpus, caption="GPUs now", right=GPU_HEADS))
    about = "A line for each node. In a container, CPU and memory are shares of its limits."
    if len(nodes) == HISTORIES_MAX:
        about += f" At most {HISTORIES_MAX} nodes are shown."
    parts.append(element("p", about if current else f"{about} No node is reporting now.", class_="faint"))
    return join(parts)


def _list_cells(node: NodeHistory) -> Sequence[Content]:
    sample = node.samples[-1]
    cpus = "-" if sample.cpu_count is None else f"{sample.cpu_count:g}"
    return [
        node.rank, f"{format_share(sample.cpu_ratio)} of {cpus}",
        format_part(sample.memory_used_bytes, sample.memory_bytes),
        format_part(sample.disk_used_bytes, sample.disk_bytes),
        f"{format_bytes(sample.disk_read_bytes_s)}/s, {format_bytes(sample.disk_written_bytes_s)}/s",
        f"{format_bytes(sample.network_received_bytes_s)}/s, {format_bytes(sample.network_sent_bytes_s)}/s",
        ", ".join(f"{count} of Xid {number}" for number, count in sample.xids.items()) or "-",
    ]  # fmt: skip


def _list_gpu_cells(node: NodeHistory) -> Iterator[Sequence[Content]]:
    for index, gpu in enumerate(node.samples[-1].gpus):
        yield [node.rank, index, *describe_gpu(gpu)]


def describe_gpu(gpu: GpuSample) -> Sequence[str]:
    """Describe a GPU: use, memory, temperature and power."""
    return [
        format_share(gpu.ratio), format_part(gpu.memory_used_bytes, gpu.memory_bytes),
        "-" if gpu.temperature_celsius is None else f"{gpu.temperature_celsius:.0f} °C",
        "-" if gpu.power_watts is None else f"{gpu.power_watts:.0f} W",
    ]  # fmt: skip


def draw_measure(title: str, nodes: Sequence[NodeHistory], read: Reader, is_share: bool) -> Markup | None:  # noqa: FBT001
    """Draw one measure of all nodes over time; None if no node reports it."""
    lines = [
        [(sample.time_s, value) for sample in node.samples if (value := read(sample)) is not None] for node in nodes
    ]
    times = [time_s for line in lines for time_s, _ in line]
    if not times:
        return None
    begin_s, end_s = min(times), max(*times, min(times) + 1)
    top = 1.0 if is_share else max(1.0, *(value for line in lines for _, value in line))

    def place(time_s: float, value: float) -> str:
        x = LEFT + (time_s - begin_s) / (end_s - begin_s) * (WIDTH - LEFT - RIGHT)
        return f"{x:.1f},{TOP + (1 - min(1.0, value / top)) * (HEIGHT - TOP - BOTTOM):.1f}"

    curves = [
        element(
            "polyline", element("title", f"node {node.rank}"), points=" ".join(place(*point) for point in piece),
            class_="curve spot",
        )
        for node, line in zip(nodes, lines, strict=True)
        for piece in _cut(line)
    ]  # fmt: skip
    high = f"0 to {format_share(1.0)}" if is_share else f"0 to {format_bytes(top)}/s"
    newest = [line[-1][1] for node, line in zip(nodes, lines, strict=True) if line and node.is_current]
    shown = mean_of_known(newest)
    text = "-" if shown is None else format_share(shown) if is_share else f"{format_bytes(shown)}/s"
    name = f"{title}: {text}" + (", mean of the nodes" if len(newest) > 1 else "")
    picture = element(
        "svg", element("title", f"{name}; the last {format_duration(end_s - begin_s)}"),
        element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=HEIGHT - BOTTOM, y2=HEIGHT - BOTTOM, class_="grid"),
        element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=TOP, y2=TOP, class_="grid"), *curves,
        element("text", f"{format_duration(end_s - begin_s)} ago", x=LEFT, y=HEIGHT - 4, class_="tick start"),
        element("text", high, x=WIDTH - RIGHT, y=HEIGHT - 4, class_="tick end"),
        viewBox=f"0 0 {WIDTH} {HEIGHT}", class_="chart small", role="img",
    )  # fmt: skip
    caption = element("figcaption", f"{title} ", element("b", text))
    return element("figure", caption, picture)


def _cut(line: Sequence[tuple[float, float]]) -> Iterator[Sequence[tuple[float, float]]]:
    """Cut a line where samples are missing: the node was lost, or its samples were."""
    begin = 0
    for index in range(1, len(line)):
        if not 0.0 <= line[index][0] - line[index - 1][0] <= GAP_S:
            yield line[begin:index]
            begin = index
    if line:
        yield line[begin:]
