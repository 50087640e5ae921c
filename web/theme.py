"""The page's look: a Gradio theme for the controls, stylesheets for everything else.

One accent (ink blue) marks what can be pressed and what MXFP4 said; BF16 is the ink itself. Amber says "the variants
differ" or "mind this", red says "wrong". The fonts come with Gradio and are served from this machine; of its Plex files
only Regular and Bold hold the whole alphabet, so 600 in the stylesheet is drawn by Bold.
"""

from pathlib import Path

import gradio as gr
from gradio.themes.utils.fonts import LocalFont

STYLESHEETS = [Path(__file__).with_name(name) for name in ("style.css", "compare.css")]
CSS = "".join(sheet.read_text(encoding="utf-8") for sheet in STYLESHEETS)

INK_BLUE = gr.themes.Color(
    name="ink-blue",
    c50="#eef2fb",
    c100="#dfe6f7",
    c200="#c2cff0",
    c300="#9bafe4",
    c400="#7089d6",
    c500="#4a67c2",
    c600="#3550a5",
    c700="#2b4186",
    c800="#253769",
    c900="#1d2a4f",
    c950="#131b33",
)

THEME = gr.themes.Base(
    primary_hue=INK_BLUE,
    secondary_hue=INK_BLUE,
    neutral_hue=gr.themes.colors.zinc,
    radius_size=gr.themes.sizes.radius_md,
    spacing_size=gr.themes.sizes.spacing_md,
    text_size=gr.themes.sizes.text_md,
    font=[LocalFont("IBM Plex Sans", weights=(400, 700)), "ui-sans-serif", "system-ui", "sans-serif"],
    font_mono=[LocalFont("IBM Plex Mono", weights=(400, 700)), "ui-monospace", "monospace"],
).set(
    body_background_fill="#fbfbfa",
    body_background_fill_dark="#131316",
    body_text_color="#1d1d20",
    body_text_color_dark="#e8e8ea",
    body_text_color_subdued="#62626b",
    body_text_color_subdued_dark="#a0a0aa",
    background_fill_primary="#ffffff",
    background_fill_primary_dark="#1b1b1f",
    background_fill_secondary="#f5f5f3",
    background_fill_secondary_dark="#212126",
    border_color_primary="#e2e2de",
    border_color_primary_dark="#33333a",
    block_background_fill="*background_fill_primary",
    block_background_fill_dark="*background_fill_primary",
    block_border_width="1px",
    block_shadow="none",
    block_label_background_fill="transparent",
    block_label_background_fill_dark="transparent",
    block_label_border_width="0px",
    block_label_text_color="*body_text_color_subdued",
    block_label_text_color_dark="*body_text_color_subdued",
    block_title_text_color="*body_text_color",
    block_title_text_color_dark="*body_text_color",
    block_title_text_weight="600",
    block_title_text_size="*text_sm",
    block_info_text_color="*body_text_color_subdued",
    block_info_text_color_dark="*body_text_color_subdued",
    input_background_fill="#ffffff",
    input_background_fill_dark="#16161a",
    input_border_color="#d3d3ce",
    input_border_color_dark="#3c3c44",
    input_border_color_focus="*primary_500",
    input_border_color_focus_dark="*primary_400",
    input_placeholder_color="#8b8b93",
    input_placeholder_color_dark="#77777f",
    input_shadow="none",
    input_shadow_focus="0 0 0 3px color-mix(in srgb, *primary_500 22%, transparent)",
    button_primary_background_fill="*primary_600",
    button_primary_background_fill_hover="*primary_700",
    button_primary_background_fill_dark="*primary_500",
    button_primary_background_fill_hover_dark="*primary_400",
    button_primary_text_color="#ffffff",
    button_primary_text_color_dark="#ffffff",
    button_secondary_background_fill="*background_fill_primary",
    button_secondary_background_fill_dark="*background_fill_secondary",
    button_secondary_background_fill_hover="*background_fill_secondary",
    button_secondary_background_fill_hover_dark="#2a2a31",
    button_secondary_border_color="*input_border_color",
    button_secondary_border_color_dark="*input_border_color",
    button_border_width="1px",
    link_text_color="*primary_600",
    link_text_color_dark="*primary_300",
    link_text_color_hover="*primary_700",
    link_text_color_hover_dark="*primary_200",
)
