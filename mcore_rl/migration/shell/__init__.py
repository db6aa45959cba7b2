"""Reader of shell scripts: evaluates variables, arrays, conditions and sourced files; runs no program."""
