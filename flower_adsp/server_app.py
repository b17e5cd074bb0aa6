"""The ServerApp of the main job."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from flower_adsp.config import load_config
from flower_adsp.experiment import run_experiment, run_probe

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run what the run config asks for."""
    config = load_config(context.run_config)
    if config.probe:
        run_probe(grid, config)
    else:
        run_experiment(grid, config)
