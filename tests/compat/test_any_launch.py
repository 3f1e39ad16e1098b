"""Whatever a launch gives its flags, there is a config that loads and a line for each of them."""

import re
import tomllib

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strop.compat.import_slime.convert import MAPPED, SFT_MAPPED, import_script
from strop.config import SFTConfig, TrainConfig, make_config

_TEXTS = """0 1 2 -1 0.5 1e400 nan inf abc a.b .b a. k1 k2 none true 0x10 /x.parquet@[0:3] /x@[:] '{a}' $X ppo cispo gspo é
    reinforce_plus_plus reinforce_plus_plus_baseline cosine math boxed_dapo a.py:f"""
VALUES = st.sampled_from([*_TEXTS.split(), "", "'a b'", "1 2", "x y z", "9" * 30, "9" * 5000])


@settings(derandomize=True, deadline=None, max_examples=200, suppress_health_check=list(HealthCheck))
@given(st.dictionaries(st.sampled_from(MAPPED), VALUES, min_size=1, max_size=20))
def test_any_values_of_any_flags_give_a_config_that_loads(tmp_path_factory, flags):
    check_import(tmp_path_factory, flags, TrainConfig)


@settings(derandomize=True, deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(st.dictionaries(st.sampled_from([*SFT_MAPPED, "--eps-clip", "--rm-type"]), VALUES, min_size=1, max_size=20))
def test_any_values_of_any_flags_of_fine_tuning_give_a_config_of_sft_that_loads(tmp_path_factory, flags):
    check_import(tmp_path_factory, flags | {"--loss-type": "sft_loss"}, SFTConfig)


def check_import(tmp_path_factory, flags, root):
    path = tmp_path_factory.getbasetemp() / "any_launch.sh"
    path.write_text(f"python3 train.py {' '.join(f'{name} {value}' for name, value in flags.items())}\n")
    found = import_script(path, "any.toml")
    assert make_config(root, tomllib.loads(found.toml), {}, file="any.toml")
    lines = [line.split("\n")[0] for line in (*found.mapped, *found.default, *found.without)]
    named = {word for line in lines for word in re.split(r"  (?:->|\()", line)[0].replace(",", " ").split()}
    assert set(flags) - named == set()
