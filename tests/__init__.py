"""Makes `from tests.compare import ...` mean this folder, whatever else is installed. Not distributed."""
