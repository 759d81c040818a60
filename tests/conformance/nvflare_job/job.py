"""The suite's job: python job.py sim|prod CASE PLACE."""

import os
import sys
from pathlib import Path

from nvflare.recipe import ProdEnv, SimEnv

from fedbatchnorm.adapters.nvflare import FederatedBatchNormAggregator
from fedbatchnorm.adapters.nvflare_recipe import FederatedBatchNormRecipe

kind, file, place = (argument for argument in sys.argv[1:] if not argument.startswith("--"))
sys.path.insert(0, place)
import cases  # noqa: E402

case = cases.read_case(file)
recipe = FederatedBatchNormRecipe(
    name="conformance",
    model={"class_path": "cases.Net", "args": {}},
    min_clients=case.clients - ("dies" in case.faults.values()),
    num_rounds=case.rounds,
    train_script="client.py",
    train_args=f"{place} {file} {'raise' if kind == 'sim' else 'hang'}",
    aggregator=FederatedBatchNormAggregator(**case.options()),
    clients_per_round=case.cohort or None,
    round_timeout=case.timeout if "dies" in case.faults.values() else 0,
)
recipe.add_server_file(str(Path(place) / "cases.py"))
if kind == "sim":
    env = SimEnv(num_clients=case.clients, workspace_root=str(Path(case.folder) / "workspace"))
else:  # a federation that is running, and the startup kit of its admin
    kit = Path(os.environ["NVFLARE_POC_WORKSPACE"]) / "example_project" / "prod_00" / "admin@nvidia.com"
    env = ProdEnv(startup_kit_location=str(kit), login_timeout=60)
run = recipe.execute(env)
print("result", run.get_result(clean_up=False), run.get_status())
