/* A verb of shardctl. One verb, one file: verb_NAME() in NAME.c, and a row in main.c's table. */
#ifndef SHD_CTL_VERB_H
#define SHD_CTL_VERB_H

/* argv[0] is the verb's own name. Returns the exit code (base/say.h). */
struct verb {
    const char *name;
    const char *summary; /* one line, for --help */
    int (*fn)(int argc, char **argv);
};

#endif
