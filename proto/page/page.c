/* The assembled page as the assembler's .incbin: no generated source, nothing to parse. */
#include "proto/page/page.h"

#include <assert.h>

static_assert(sizeof(size_t) == 8, "page_html_bytes is a .quad");

__asm__(".section .rodata, \"a\"\n"
        ".global page_html, page_html_bytes\n"
        ".hidden page_html, page_html_bytes\n"
        "page_html:\n"
        ".incbin \"" PAGE_FILE "\"\n"
        "0:\n"
        ".balign 8\n"
        "page_html_bytes:\n"
        ".quad 0b - page_html\n"
        ".text\n");
