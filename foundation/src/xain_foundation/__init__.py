"""Foundation of every program: settings, logs, command line, atomic files, threads."""
