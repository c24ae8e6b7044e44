/* Texts whose contrast with what is behind them is below 4.5 (3 for large ones), as WCAG AA has it,
 * as ["1.23 text", ...]. Grounds made of images are taken as the colour below them. */
(() => {
  const numbers = (color) => color.match(/[\d.]+/g).map(Number);
  const channel = (c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const color = numbers(getComputedStyle(node).backgroundColor);
      if (color.length < 4 || color[3] > 0) return color;
    }
    return [255, 255, 255];
  };
  const bad = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let text = walker.nextNode(); text; text = walker.nextNode()) {
    const node = text.parentElement, style = getComputedStyle(node);
    if (!text.data.trim() || !node.checkVisibility() || node.closest(".hidden, .skip, script, style, noscript")) continue;
    const [a, b] = [light(numbers(style.color)), light(ground(node))].sort((x, y) => y - x);
    const size = parseFloat(style.fontSize), large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < (large ? 3 : 4.5)) bad.push(ratio.toFixed(2) + " " + text.data.trim().slice(0, 40));
  }
  return bad;
})()
