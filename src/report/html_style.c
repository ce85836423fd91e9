#include "html_style.h"

#include <stddef.h>

/* clang-format off */
const char *const qc_html_style[] = {
    ":root{color-scheme:light dark;--page:#f5f6f8;--card:#fff;--ink:#16191d;--soft:#5c6570;"
    "--rule:#dfe3e8;--grid:#eceff2;--good:#11713f;--good-bg:#e2f3e9;--bad:#a8201a;--bad-bg:#fbe7e5;"
    "--c1:#2a6fd0;--c2:#d9622b;--c3:#1a9a6c;--c4:#8a94a0;--c5:#8a5cc7}\n",
    "@media (prefers-color-scheme:dark){:root{--page:#101317;--card:#191d23;--ink:#e8ebef;"
    "--soft:#9aa4b0;--rule:#2e353e;--grid:#252b33;--good:#63d397;--good-bg:#143024;--bad:#ff8f87;"
    "--bad-bg:#3a1a19;--c1:#5b9bf0;--c2:#ec8450;--c3:#3fbf8f;--c4:#7d8894;--c5:#ac88e6}}\n",
    "*{box-sizing:border-box}\n",
    "body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"
    "\"Segoe UI\",Roboto,\"Helvetica Neue\",Arial,sans-serif}\n",
    "main{max-width:1180px;margin:0 auto;padding:24px 20px 60px}\n",
    "header{margin-bottom:22px}\n",
    "h1{font-size:27px;line-height:1.25;margin:2px 0 6px;overflow-wrap:anywhere}\n",
    "h2{font-size:19px;margin:34px 0 12px;overflow-wrap:anywhere}\n",
    "h3{font-size:15px;margin:22px 0 8px}\n",
    ".soft,.note,figcaption span{color:var(--soft)}\n",
    ".soft{margin:0;overflow-wrap:anywhere}\n",
    ".note{font-size:13px}\n",
    ".verdict{display:inline-block;padding:3px 12px;border-radius:99px;font-weight:600;font-size:14px}\n",
    ".pass{background:var(--good-bg);color:var(--good)}.fail{background:var(--bad-bg);color:var(--bad)}\n",
    ".none{background:var(--grid);color:var(--soft)}\n",
    ".cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(125px,1fr));gap:12px;"
    "margin:14px 0}\n",
    ".card{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:12px 14px}\n",
    ".card b{display:block;font-size:22px;line-height:1.3;font-variant-numeric:tabular-nums}\n",
    ".card span{color:var(--soft);font-size:13px;display:block}\n",
    ".plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,460px),1fr));gap:14px;"
    "margin:14px 0}\n",
    ".plot,.box,details{background:var(--card);border:1px solid var(--rule);border-radius:10px;"
    "padding:14px 16px;margin:0}\n",
    ".plot{min-width:0;break-inside:avoid}.plot.wide{max-width:690px}\n",
    ".box{overflow-x:auto}details{margin-top:12px}summary{cursor:pointer;font-weight:600}\n",
    "details>div{overflow-x:auto}\n",
    "figcaption{margin-bottom:6px}figcaption b{margin-right:6px}figcaption span{font-size:13px}\n",
    ".legend{margin:0 0 6px;font-size:13px;color:var(--soft)}\n",
    ".legend i{display:inline-block;width:11px;height:11px;border-radius:2px;margin:0 5px 0 0;"
    "vertical-align:-1px}\n",
    ".legend span{white-space:nowrap;margin-right:14px}.scale i{margin:0}\n",
    ".k1{background:var(--c1)}.k2{background:var(--c2)}.k3{background:var(--c3)}.k4{"
    "background:var(--c4)}.k5{background:var(--c5)}\n",
    ".scroll{overflow-x:auto}.fit{max-width:640px}\n",
    "svg{display:block;width:100%;min-width:430px;height:auto;font:12px system-ui,-apple-system,"
    "\"Segoe UI\",Roboto,Arial,sans-serif}\n",
    ".s1{fill:var(--c1)}.s2{fill:var(--c2)}.s3{fill:var(--c3)}.s4{fill:var(--c4)}.s5{fill:var(--c5)}\n",
    ".line{fill:none;stroke-width:2;stroke-linejoin:round}.line.s1{stroke:var(--c1)}.line.s4{"
    "stroke:var(--c4)}\n",
    ".point{stroke:var(--card);stroke-width:1.5}\n",
    ".grid{stroke:var(--grid)}.axis{stroke:var(--c4)}.mark{stroke:var(--ink);stroke-dasharray:3 3}\n",
    ".tick,.title{fill:var(--soft)}.label{fill:var(--ink);stroke:var(--card);stroke-width:3;"
    "paint-order:stroke}\n",
    ".up{font-size:9px}.inside{fill:#fff;font-weight:600}\n",
    "table{border-collapse:collapse;width:100%;font-size:14px}\n",
    "th,td{text-align:left;padding:6px 12px 6px 0;border-bottom:1px solid var(--rule);"
    "vertical-align:top}\n",
    "tr:last-child td{border-bottom:0}th{color:var(--soft);font-weight:500;font-size:13px;"
    "white-space:nowrap}\n",
    "td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}\n",
    "td.name{overflow-wrap:anywhere;min-width:150px}.small{font-size:13px;margin-top:6px}.small th{"
    "text-align:right}\n",
    ".small td{padding-top:3px;padding-bottom:3px}\n",
    "td.ok{color:var(--good);font-weight:600}td.no{color:var(--bad);font-weight:600}\n",
    "code,pre{font:12.5px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}\n",
    "pre{margin:10px 0 0;white-space:pre-wrap;overflow-wrap:anywhere}code{overflow-wrap:anywhere}\n",
    "@media (max-width:560px){main{padding:14px 12px 40px}h1{font-size:22px}.cards{"
    "grid-template-columns:1fr 1fr;gap:8px}.card{padding:10px}.card b{font-size:18px}.plot,.box,"
    "details{padding:12px}}\n",
    "@media print{:root{color-scheme:light;--page:#fff;--card:#fff;--ink:#000;--soft:#444;--rule:#ccc;"
    "--grid:#e5e5e5;--good:#11713f;--good-bg:#e2f3e9;--bad:#a8201a;--bad-bg:#fbe7e5;--c1:#2a6fd0;"
    "--c2:#d9622b;--c3:#1a9a6c;--c4:#8a94a0;--c5:#8a5cc7}*{-webkit-print-color-adjust:exact;"
    "print-color-adjust:exact}main{max-width:none;padding:0}svg{min-width:0}.plots{"
    "grid-template-columns:1fr 1fr}.card,figure,tr,h2,h3{break-inside:avoid}h2,h3{break-after:avoid}"
    "details:not([open]){display:none}}\n",
    NULL};
