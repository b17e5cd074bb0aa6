"""Weights & Biases: off unless ``tracking.wandb`` asks for it, and imported only then."""

from collections import Counter
from collections.abc import Mapping
from logging import INFO, WARNING
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.common.logger import log

from flower_adsp.errors import ConfigError
from flower_adsp.tracking.base import Callback, Record
from flower_adsp.tracking.files import CONFIG, HISTORY, MODEL, REPORT, SUMMARY

if TYPE_CHECKING:
    from flower_adsp.config import TrackingSettings
    from flower_adsp.strategies.state import FederationState

_LOGIN_SECONDS = 20.0


class WandbTracker(Callback):
    """Follows a run in Weights & Biases.

    Metrics are drawn over ``t``, seconds of the run's clock; ``commits`` is logged beside it. What
    it logs: ``validation/...`` and traffic at each evaluation; at each check period the strategy's
    own numbers, ``device/<worker>/...`` and ``refused/<kind>``; ``unit/<name>/trainers`` for each
    layer plan. At the end come the summary, an artifact with the model and the
    run's other files, and the report.

    Parameters
    ----------
    settings : TrackingSettings
        ``wandb`` is ``online`` or ``offline``; the others are W&B's own terms.
    folder : Path
        The run's folder, in which W&B's folder is made too.
    config : Mapping[str, Any]
        All settings of the run.

    Raises
    ------
    ConfigError
        If wandb is not installed.
    """

    def __init__(
        self, settings: "TrackingSettings", folder: Path, config: Mapping[str, Any]
    ) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                f"tracking.wandb = {settings.wandb!r} needs wandb ({error}); "
                "pip install 'flower-adsp[wandb]' brings it"
            ) from None
        self._wandb = wandb
        self._settings = settings
        self._folder = folder
        self._config = config
        self._id: str | None = settings.wandb_run_id or None
        self._run: Any = None

    # -------------------------------------------------------------------------------- a callback

    def on_event(self, record: Record, state: "FederationState") -> None:
        """Log what W&B shows of it."""
        event = record["event"]
        if event == "evaluation":
            figures = {
                f"validation/{key}": value
                for key, value in record.items()
                if key not in ("event", "t", "index", "commits", "bytes_up", "bytes_down")
                and isinstance(value, int | float)
            }
            figures |= {key: record[key] for key in ("bytes_up", "bytes_down")}
            self._log(record, state, figures)
        elif event == "checkpoint":
            self._log(record, state, {**_numbers(record), **_device_figures(state)})
        elif event == "plan":
            trainers = Counter(
                unit for worker in record["workers"].values() for unit in worker["ratios"]
            )
            figures = {f"unit/{unit}/trainers": trainers[unit] for unit in record["units"]}
            figures |= {
                f"device/{worker}/plan_peak_mib": plan["peak_mib"]
                for worker, plan in record["workers"].items()
            }
            self._log(record, state, figures)

    def state_dict(self) -> dict[str, Any]:
        """Return the id of the W&B run."""
        return {"id": self._begun().id}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the W&B run that had been begun."""
        self._id = str(state["id"])

    # ------------------------------------------------------------------------------------ the end

    def complete(self, numbers: Mapping[str, Any]) -> None:
        """Hand over what a run came to: its numbers, its model and its report.

        Parameters
        ----------
        numbers : Mapping[str, Any]
            What ``summary.json`` holds.
        """
        run = self._begun()
        for index, figures in numbers.get("evaluations", {}).items():  # of Flower's strategies
            run.log({"round": int(index), **{f"validation/{k}": v for k, v in figures.items()}})
        run.summary.update(
            {key: value for key, value in numbers.items() if key not in ("config", "devices")}
        )
        artifact = self._wandb.Artifact(f"model-{run.id}", type="model")
        for name in (MODEL, CONFIG, SUMMARY, HISTORY):
            if (self._folder / name).is_file():
                artifact.add_file(str(self._folder / name))
        run.log_artifact(artifact)
        if (self._folder / REPORT).is_file():
            run.log({"report": self._wandb.Html(str(self._folder / REPORT), inject=False)})
        self._finish(0)

    def abandon(self) -> None:
        """End the W&B run as failed, unless it has been completed."""
        self._finish(1)

    def _finish(self, exit_code: int) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish(exit_code=exit_code)
            self._wandb.teardown()  # its service process would stay

    # ----------------------------------------------------------------------------------- the run

    def _begun(self) -> Any:
        """Return the W&B run, which begins with its first use."""
        if self._run is None:
            mode = self._settings.wandb
            if mode == "online":
                try:
                    self._run = self._begin("online")
                except self._wandb.Error as error:
                    log(
                        WARNING,
                        "Weights & Biases cannot be reached (%s); it goes on offline, and "
                        "`wandb sync` sends the run later",
                        str(error).splitlines()[0],
                    )
                    self._wandb.teardown()
            if self._run is None:
                self._run = self._begin("offline")
            self._run.define_metric("t", hidden=True)
            self._run.define_metric("*", step_metric="t")
            log(INFO, "Weights & Biases: %s", self._run.url or self._run.dir)
        return self._run

    def _begin(self, mode: Any) -> Any:
        settings = self._settings
        return self._wandb.init(
            mode=mode,
            project=settings.wandb_project,
            entity=settings.wandb_entity or None,
            id=self._id,
            resume="allow" if self._id else None,
            name=self._folder.name,
            dir=str(self._folder),
            config=dict(self._config),
            settings=self._wandb.Settings(
                init_timeout=_LOGIN_SECONDS,
                sweep_id=settings.wandb_sweep_id or None,
                console="off",
                silent=True,
                disable_git=True,
                disable_code=True,
                x_disable_stats=True,
            ),
        )

    def _log(self, record: Record, state: "FederationState", figures: Mapping[str, float]) -> None:
        self._begun().log({"t": record["t"], "commits": state.commits, **figures})


def _numbers(record: Record) -> dict[str, float]:
    """Return the strategy's own numbers at a check period."""
    return {
        f"strategy/{key}": value
        for key, value in record.items()
        if key not in ("t", "index") and isinstance(value, int | float)
    }


def _device_figures(state: "FederationState") -> dict[str, float]:
    figures: dict[str, float] = {}
    refused: Counter[str] = Counter()
    now = max(state.now, 1)
    for worker in state.workers.values():
        computing, communicating, blocked = worker.spent(state.now)
        figures |= {
            f"device/{worker.id}/commits": worker.commits,
            f"device/{worker.id}/steps": worker.steps,
            f"device/{worker.id}/computing": computing / now,
            f"device/{worker.id}/communicating": communicating / now,
            f"device/{worker.id}/blocked": blocked / now,
        }
        refused.update(worker.refused)
    return figures | {f"refused/{kind}": count for kind, count in refused.items()}
