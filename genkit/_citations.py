"""BibTeX of the papers that genkit implements; only what could be verified is stated."""

from __future__ import annotations

from collections.abc import Iterable

from genkit.errors import ConfigError, nearest

__all__ = ["CITATIONS", "bibtex"]

#: method → BibTeX entry. An author list that could not be verified is left out: take it from the arXiv page.
CITATIONS = {
    "heavy_tailed_flow": """@article{yang2026heavytailed,
  title   = {Heavy-Tailed Flow Matching via Random Clocks},
  author  = {Yang, Zhouhao and Wang, Yezhen and Kawaguchi, Kenji and Braverman, Vladimir and Cao, Haoyang},
  journal = {arXiv preprint arXiv:2607.13841},
  year    = {2026}
}""",
    "rmmd": """@article{jacq2026rmmd,
  title   = {{RMMD}, diffusion fine-tuning with Rewarded Moment Matching Distillation},
  author  = {Jacq and Couairon and De Bortoli and Berthet and Doucet and Elie},
  journal = {arXiv preprint arXiv:2606.30414},
  year    = {2026},
  note    = {first names: see the arXiv page}
}""",
    "diffusion_drf": """@article{wang2026diffusiondrf,
  title   = {Differentiable Reward Flow for Video Diffusion Fine-Tuning},
  author  = {Wang, Y. and Li, Y. and Tulyakov, S. and Fu, Y. and Kag, A.},
  journal = {arXiv preprint arXiv:2601.04153},
  year    = {2026},
  note    = {title and authors of version 1}
}""",
    "crystal_tree_search": """@article{diffusiontreesampling2025,
  title   = {Diffusion Tree Sampling},
  journal = {arXiv preprint arXiv:2506.20701},
  year    = {2025},
  note    = {the tree search that crystal tree search builds on; authors: see the arXiv page}
}""",
    "block_diffusion": """@article{nextblock2025,
  title   = {From Next-Token to Next-Block},
  journal = {arXiv preprint arXiv:2512.06776},
  year    = {2025},
  note    = {authors: see the arXiv page}
}""",
}


def bibtex(methods: Iterable[str] = ()) -> str:
    """The entries of ``methods`` (all by default), ready for a .bib file."""
    names = list(methods) or list(CITATIONS)
    for name in names:
        if name not in CITATIONS:
            raise ConfigError(f"no paper for {name!r}; expected {', '.join(CITATIONS)}.{nearest(name, CITATIONS)}")
    return "\n\n".join(CITATIONS[name] for name in names)
