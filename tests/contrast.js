// The texts of a page whose contrast is below 4.5 to 1, by the formula of WCAG 2.
(() => {
  for (const item of [...document.querySelectorAll('details')].slice(0, 3)) { item.open = true; }
  const part = (v) => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; };
  const light = (c) => { const [r, g, b] = c.match(/[0-9.]+/g).map(Number);
    return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b); };
  const back = (e) => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
    if (!c.endsWith(', 0)')) return c; } return 'rgb(255, 255, 255)'; };
  const low = [];
  for (const e of document.querySelectorAll('body *')) {
    if (e.disabled || ![...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim())) continue;
    if (['SCRIPT', 'STYLE', 'NOSCRIPT'].includes(e.tagName)) continue;
    const color = e.namespaceURI.endsWith('svg') ? getComputedStyle(e).fill : getComputedStyle(e).color;
    const [a, b] = [light(color), light(back(e))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) low.push(`${e.tagName}.${e.className}: ${color}`);
  }
  return [...new Set(low)];
})()
