// Texts whose contrast with what lies behind them is less than WCAG's AA asks for, 4.5 to 1. Text on a
// tile of a picture says in data-on what lies behind it.
() => {
  const numbers = c => c.match(/[\d.]+/g).map(Number);
  const hex = c => [1, 3, 5].map(i => parseInt(c.slice(i, i + 2), 16));
  const luminance = c => { const [r, g, b] = c.slice(0, 3).map(v => (v /= 255) <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4); return .2126 * r + .7152 * g + .0722 * b; };
  function behind(e) {
    for (; e; e = e.parentElement) {
      const c = numbers(getComputedStyle(e).backgroundColor);
      if (c.length < 4 || c[3] === 1) return c;
      if (c[3]) throw Error("half transparent: " + e.outerHTML.slice(0, 80));
    }
    return [255, 255, 255];
  }
  const found = [];
  function check(text, color, back) {
    const a = luminance(color), b = luminance(back), ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    if (ratio < 4.5) found.push([text.trim().slice(0, 40), +ratio.toFixed(2)]);
  }
  let count = 0;
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const text = walk.currentNode.data, e = walk.currentNode.parentElement;
    if (!text.trim() || ["SCRIPT", "STYLE"].includes(e.tagName) || !e.getClientRects().length) continue;
    const style = getComputedStyle(e); count++;
    if (+style.opacity !== 1) throw Error("half transparent: " + text);
    check(text, numbers(e.closest("svg") ? style.fill : style.color), e.dataset.on ? hex(e.dataset.on) : behind(e));
  }
  for (const e of document.querySelectorAll("[placeholder]")) check(e.placeholder, numbers(getComputedStyle(e, "::placeholder").color), behind(e));
  return [count, found];
}
