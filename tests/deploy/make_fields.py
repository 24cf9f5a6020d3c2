# SPDX-License-Identifier: Apache-2.0
"""Write kserve_fields.json: the fields, and their types, of what the manifests in docker/kserve use.

Run by hand when the manifests use new types: in an environment with `pip install --no-deps kserve==0.21.0` and
`pip install kubernetes`, `python tests/deploy/make_fields.py FOLDER_OF_KSERVE_MODELS`.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

import kubernetes.client.models

HERE = Path(__file__).parent
ROOTS = ("V1alpha1ServingRuntime", "V1beta1InferenceService")
USED = re.compile(r"V[12]\w+")
SKIPPED = re.compile(
    r"Status|Transformer|Explainer|WorkerSpec|V1Affinity|VolumeSource$|ResourceClaim|Metric|ManagedFields|Owner"
)
KEPT = ("V1EmptyDirVolumeSource",)


def main(kserve_models: Path) -> None:
    sources = {path: path.read_text() for path in kserve_models.glob("*.py")}
    kserve = {name: text for text in sources.values() for name in re.findall(r"^class (V1\w+)\(", text, re.MULTILINE)}
    fields: dict[str, dict[str, str]] = {}
    waiting = list(ROOTS)
    while waiting:
        name = waiting.pop()
        if name in fields or (SKIPPED.search(name) and name not in KEPT):
            continue
        types, keys = _tables(kserve[name]) if name in kserve else _kubernetes_tables(name)
        fields[name] = {keys[attribute]: kind for attribute, kind in sorted(types.items())}
        waiting += [found for kind in types.values() for found in USED.findall(kind)]
    (HERE / "kserve_fields.json").write_text(json.dumps(fields, indent=1, sort_keys=True) + "\n")


def _tables(source: str) -> tuple[dict[str, str], dict[str, str]]:
    found = [
        re.search(rf"    {name} = (\{{.*?\n    \}})", source, re.DOTALL) for name in ("openapi_types", "attribute_map")
    ]
    types, keys = (ast.literal_eval(match[1]) for match in found if match)
    return types, keys


def _kubernetes_tables(name: str) -> tuple[dict[str, str], dict[str, str]]:
    model = getattr(kubernetes.client.models, name)
    return model.openapi_types, model.attribute_map


if __name__ == "__main__":
    main(Path(sys.argv[1]))
