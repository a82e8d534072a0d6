"""Made-up requests, led to what is there. What a schema does not say is made right: that whole numbers are written without a point."""

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


@schemathesis.hook
def map_body(context, body):
    return usable(body)


def usable(value):
    if isinstance(value, dict):
        return {key: usable(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [usable(inner) for inner in value]
    # Beyond that a whole number is no number of JSON's any more.
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value
