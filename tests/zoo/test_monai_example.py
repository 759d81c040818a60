"""The MONAI example: what it makes is what it says, and both of its methods train."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples" / "monai"
sys.path.append(str(EXAMPLES))
import unet  # noqa: E402


def test_sites_differ_in_gain_and_offset_alone():
    data = unet.sites(0)
    for site, ((x, masks), _) in data.items():
        gain, offset = unet.SCANNERS[site]
        tissue = (x - offset) / gain
        assert tissue.std() == pytest.approx(0.55, abs=0.12), site
        assert 0.01 < masks.mean() < 0.3
        inside, outside = tissue[masks > 0].mean(), tissue[masks == 0].mean()
        assert inside - outside == pytest.approx(1.0, abs=0.2), site


@pytest.mark.parametrize("method", unet.METHODS)
def test_a_method_trains(method, monkeypatch):
    monkeypatch.setattr(unet, "TRAIN", 8)
    monkeypatch.setattr(unet, "TEST", 4)
    data, before = unet.sites(0), unet.new_model(0).state_dict()
    model = unet.METHODS[method](0, data, 2, 0.1)
    state = model.state_dict()
    assert any(not torch.equal(state[n], v) for n, v in before.items() if n.endswith("weight"))
    assert all(value.isfinite().all() for value in state.values())
    assert all(0 <= unet.dice(model, test) <= 1 for _, test in data.values())


def test_the_first_layer_s_statistics_are_those_of_all_sites_together(monkeypatch):
    """Federated, after the calibration; averaged variances miss what lies between the sites."""
    monkeypatch.setattr(unet, "TRAIN", 8)
    data = unet.sites(0)
    model = unet.federated(0, data, 0, 0.1)
    plain = unet.new_model(0).double()
    layers = [m for m in plain.modules() if isinstance(m, torch.nn.BatchNorm3d)]
    seen = []
    layers[0].register_forward_pre_hook(lambda m, x: seen.append(x[0].detach()))
    with torch.no_grad():
        plain.train()(torch.cat([x for (x, _), _ in data.values()]).double())
    union = seen[0].transpose(0, 1).flatten(1)
    ours = next(m for m in model.modules() if isinstance(m, torch.nn.BatchNorm3d))
    torch.testing.assert_close(ours.running_mean.double(), union.mean(1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.running_var.double(), union.var(1), rtol=1e-4, atol=1e-4)


def test_the_script_writes_its_results(tmp_path):
    code = f"import sys; sys.path[:0] = [{str(EXAMPLES)!r}]; import unet; "
    code += "unet.TRAIN = unet.TEST = 4; unet.main()"
    command = [sys.executable, "-W", "ignore", "-c", code, "--rounds", "1", "--seeds", "0", "--json"]
    subprocess.run([*command, str(tmp_path / "found.json")], check=True, capture_output=True)
    found = json.loads((tmp_path / "found.json").read_text())
    assert set(found["dice"]) == set(unet.METHODS)
    assert {len(values) for row in found["dice"].values() for values in row.values()} == {1}
    assert found["commit"]
