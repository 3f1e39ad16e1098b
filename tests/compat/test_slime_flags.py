"""Every flag that slime's parser takes, and every one that its scripts give, is known by name."""

import pytest
from slime_flags import OF_ITS_PARSER, OF_ITS_SCRIPTS

from strop.compat.import_slime.targets import MAPPED
from strop.compat.import_slime.without import reason_without


@pytest.mark.parametrize("flags", [OF_ITS_PARSER, OF_ITS_SCRIPTS], ids=["the parser's", "the scripts'"])
def test_every_flag_of_slime_is_mapped_or_has_a_reason(flags):
    assert len(flags) > 200
    assert [flag for flag in flags if flag not in MAPPED and "not a flag of slime" in reason_without(flag)] == []
