"""`broker check` for clouds behind SkyPilot.

Whether it is installed, whether its server responds, and which clouds are enabled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from broker.clock import Clock
from broker.clouds import WITHOUT_SELF_TERMINATION
from broker.clouds.findings import CheckResult
from broker.clouds.sky.engine import Engine
from broker.clouds.sky.errors import COLORS, NotInstalledError
from broker.clouds.sky.login import find_python
from broker.clouds.sky.makers import make_engine
from broker.clouds.sky.state_file import SkyStateFile
from broker.config import Config
from broker.errors import CloudError, TransientError
from broker.frozen import frozen

INSTALL = "pip install 'intercloud-broker[sky]'"
NOT_INSTALLED = "install `intercloud-broker[sky]`"
START, INFO = "sky api start", "sky api info"
COMMANDS: dict[type[CloudError], str] = {NotInstalledError: INSTALL, TransientError: START}


@frozen
class Survey:
    """SkyPilot's report on all clouds; `fault` holds the error if it could not be queried."""

    server: CheckResult
    enabled: tuple[str, ...] = ()


class SkyInspector:
    """`Inspector` and `CanInspectQuickly` for one cloud. Inspectors in one command share the first one's survey."""

    _surveys: ClassVar[dict[str, Survey]] = {}

    def __init__(self, cloud: str, engine: Engine | None = None) -> None:
        self._cloud = cloud
        self._engine = engine

    async def inspect_quickly(self, config: Config, *, clock: Clock) -> Sequence[CheckResult]:
        """Report SkyPilot's last check. Enabled clouds are remembered: launches may use them from now on."""
        engine = self._find_engine()
        if engine is None:
            return [CheckResult(name="skypilot", is_ok=False, note=NOT_INSTALLED, command=INSTALL)]
        key = str(config.home)
        if key not in self._surveys:
            self._surveys[key] = await survey(engine, SkyStateFile(config.home / "sky"))
        survey_result = self._surveys[key]
        return (
            [survey_result.server, self._judge(survey_result.enabled)]
            if survey_result.server.is_ok
            else [survey_result.server]
        )

    async def inspect(self, config: Config, *, clock: Clock) -> Sequence[CheckResult]:
        """Have SkyPilot check the cloud itself, and show its report."""
        engine = self._find_engine()
        if engine is None:
            return [CheckResult(name="skypilot", is_ok=False, note=NOT_INSTALLED, command=INSTALL)]
        state_file = SkyStateFile(config.home / "sky")
        survey_result = await survey(engine, state_file)
        if not survey_result.server.is_ok:
            return [survey_result.server]
        is_enabled, text = await engine.check(self._cloud)
        state_file.note_enabled(await engine.list_enabled())
        findings = [survey_result.server, self._judge([self._cloud] if is_enabled else [], read_reason(text))]
        if is_enabled and self._cloud in WITHOUT_SELF_TERMINATION:
            note = "its machines cannot terminate themselves: nodes that broker loses track of run until `broker gc`"
            findings.append(CheckResult(name="lease", is_ok=False, note=note, is_needed=False))
        return findings

    def write_policy(self, config: Config) -> str:
        """Refer to SkyPilot's own list of minimal permissions."""
        return f"# {self._cloud} is used through SkyPilot, whose permissions are described at\n{PERMISSIONS}\n"

    def _find_engine(self) -> Engine | None:
        python = find_python() if self._engine is None else None
        return make_engine(python) if python else self._engine

    def _judge(self, enabled: Sequence[str], reason: str = "") -> CheckResult:
        if self._cloud in enabled:
            return CheckResult(name="login", is_ok=True, note="enabled in SkyPilot")
        note = reason or "not enabled in SkyPilot"
        return CheckResult(name="login", is_ok=False, note=note, command=f"sky check {self._cloud}")


PERMISSIONS = "# https://docs.skypilot.co/en/latest/cloud-setup/cloud-permissions/index.html"


async def survey(engine: Engine, state_file: SkyStateFile) -> Survey:
    """Query SkyPilot without starting a server. If none responds, the remembered clouds stay as they are."""
    try:
        server = await engine.hello()
        enabled = await engine.list_enabled()
    except CloudError as error:
        command = next((command for kind, command in COMMANDS.items() if isinstance(error, kind)), INFO)
        return Survey(server=CheckResult(name="skypilot", is_ok=False, note=error.message, command=command))
    state_file.note_enabled(enabled)
    note = f"SkyPilot {server['version']} at {server['url']}"
    return Survey(server=CheckResult(name="skypilot", is_ok=True, note=note), enabled=tuple(enabled))


def read_reason(text: str) -> str:
    """Return the text that `sky check` prints between the cloud's line and its summary, on one line."""
    blocks = COLORS.sub("", text).split("\n\n")
    lines = [line.strip() for line in blocks[0].splitlines()[2:]]
    return " ".join(line for line in lines if line)
