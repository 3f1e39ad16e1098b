"""`strop import-slime`: a launch script of slime becomes a config of strop. The script is read, never run."""

from strop.compat.import_slime.convert import Imported, import_script
from strop.compat.import_slime.output import write_new
from strop.compat.import_slime.targets import KNOWN

__all__ = ["KNOWN", "Imported", "import_script", "write_new"]
