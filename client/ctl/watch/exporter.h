/* shardctl exporter: see exporter.c. */
#ifndef SHD_CTL_EXPORTER_H
#define SHD_CTL_EXPORTER_H

/* argv[0] is the verb. Returns the exit code (base/say.h). */
int verb_exporter(int argc, char **argv);

#endif
