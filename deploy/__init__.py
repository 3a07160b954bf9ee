"""What people run afterwards: whole models with the adapter merged in, whose template is that of training."""
