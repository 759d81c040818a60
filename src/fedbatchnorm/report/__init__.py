"""Run folders in, figures and one HTML page out."""
