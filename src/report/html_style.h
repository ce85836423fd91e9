/* Style sheet of the HTML page. */
#ifndef QC_HTML_STYLE_H
#define QC_HTML_STYLE_H

/* Pieces, NULL-terminated, without <style> around them. Light and dark by what the reader prefers, narrow and
 * wide, paper. */
extern const char *const qc_html_style[];

#endif
