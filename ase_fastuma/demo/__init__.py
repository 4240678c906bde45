"""The bundled potential: `demo.pt`, and `MODEL_CARD.md` on what it is good for."""
