"""The side inside the box: standard library only, imported by a bare interpreter that sees nothing else."""
