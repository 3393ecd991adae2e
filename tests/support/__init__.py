"""What tests share: processes, launchers, models and what is exact."""
