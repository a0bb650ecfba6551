"""What people see of runs: tables, sentences, pictures, the page in a browser, progress and trackers of experiments."""
