# A library with about as many unwind rows as an ordinary one: 2,500 functions.
        .text
        .rept   2500
        .cfi_startproc
        pushq   %rbx
        .cfi_adjust_cfa_offset 8
        .cfi_rel_offset %rbx, 0
        popq    %rbx
        .cfi_adjust_cfa_offset -8
        .cfi_restore %rbx
        ret
        .cfi_endproc
        .p2align 4
        .endr
        .section .note.GNU-stack, "", @progbits
