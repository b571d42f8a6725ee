def write(experiment, out, command):
    return []
