"""The task that a run's settings name."""

from flower_adsp.config import Config
from flower_adsp.errors import ConfigError
from flower_adsp.tasks.base import Task


def build_task(config: Config) -> Task:
    """Build the task that the settings name.

    Raises
    ------
    ConfigError
        If what the target returns is not a task.
    """
    task = config.task.build(seed=config.seed)
    if not isinstance(task, Task):
        raise ConfigError(
            f"task.target = {config.task.name!r} returned a {type(task).__name__}, which lacks "
            "batch_size, build_model, loss, train_data, held_out_data or metrics"
        )
    return task
