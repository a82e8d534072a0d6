"""Made-up ids lead nowhere: most requests are about what is there."""

import schemathesis

KNOWN = {"rollout_id": "r", "attempt_id": "0", "mode": "train", "model": "policy"}


@schemathesis.hook
def map_path_parameters(context, path_parameters):
    # What is deleted is not what the others ask for.
    if path_parameters and context.operation.method.upper() != "DELETE":
        for name, known in KNOWN.items():
            if isinstance(path_parameters.get(name), str) and len(path_parameters[name]) % 4:
                path_parameters[name] = known
    return path_parameters
