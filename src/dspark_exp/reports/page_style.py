"""Style and table sorting of the index page; Okabe-Ito colours, contrast of at least 4.5 in light and dark."""

STYLE = """
:root{--ink:#1b1f24;--soft:#57606a;--paper:#fff;--line:#d0d7de;--stripe:#f6f8fa;--link:#0550ae;
--good:#00664b;--bad:#a33c00;--open:#57606a}
@media (prefers-color-scheme:dark){:root{--ink:#e6edf3;--soft:#9da7b1;--paper:#0d1117;--line:#30363d;--stripe:#161b22;
--link:#79c0ff;--good:#3fd0a4;--bad:#ff9d5c;--open:#9da7b1}
img{background:#fff;padding:.5rem;border-radius:6px}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.55 system-ui,sans-serif}
main{max-width:72rem;margin:0 auto;padding:1.2rem}
h1{font-size:1.7rem;margin:.4rem 0}h2{font-size:1.35rem;margin:2.4rem 0 .6rem;border-top:1px solid var(--line);
padding-top:1.4rem}h3{font-size:1.08rem;margin:1.6rem 0 .4rem}
a{color:var(--link)}img{max-width:100%;height:auto}
.toc{columns:18rem;padding-left:1.2rem}
.wide{overflow-x:auto;margin:.8rem 0}
table{border-collapse:collapse;font-size:.88rem;font-variant-numeric:tabular-nums}
th,td{padding:.32rem .6rem;border-bottom:1px solid var(--line);text-align:left;vertical-align:top}
th{cursor:pointer;white-space:nowrap;color:var(--soft);font-weight:600;user-select:none}
th[aria-sort=ascending]::after{content:" \\25B2"}th[aria-sort=descending]::after{content:" \\25BC"}
tbody tr:nth-child(even){background:var(--stripe)}
.claims td:nth-child(2){min-width:15rem}
.verdict{font-weight:600;white-space:nowrap}.shown{color:var(--good)}.contradicted{color:var(--bad)}
.not-shown,.not-at-this-scale{color:var(--open)}
pre{overflow-x:auto;font-size:.78rem;background:var(--stripe);padding:.8rem;border-radius:6px}
.files{color:var(--soft);font-size:.88rem}
""".strip()

SCRIPT = """
const value = cell => { const text = cell ? cell.textContent.trim() : '';
  const found = text.replace(/,/g, '').match(/^[+-]?\\d+(\\.\\d+)?/); return found ? parseFloat(found[0]) : text; };
document.querySelectorAll('th').forEach(head => { head.tabIndex = 0; const sort = () => {
  const table = head.closest('table'), body = table.tBodies[0], column = head.cellIndex;
  const down = head.getAttribute('aria-sort') === 'ascending';
  table.querySelectorAll('th').forEach(other => other.removeAttribute('aria-sort'));
  head.setAttribute('aria-sort', down ? 'descending' : 'ascending');
  [...body.rows].sort((a, b) => { const x = value(a.cells[column]), y = value(b.cells[column]);
    const order = typeof x === 'number' && typeof y === 'number' ? x - y : String(x).localeCompare(String(y));
    return down ? -order : order; }).forEach(row => body.append(row)); };
  head.addEventListener('click', sort);
  head.addEventListener('keydown', event => { if (event.key === 'Enter') sort(); }); });
""".strip()
